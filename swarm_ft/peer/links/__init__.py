"""What joins this peer to others: streams that stand from attempt to attempt."""
