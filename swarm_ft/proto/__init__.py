"""Generated from proto/ by deploy/generate_proto.sh; never edited."""
