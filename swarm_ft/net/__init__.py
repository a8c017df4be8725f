"""Exchanges between members: enrolment, and transfers of large files."""
