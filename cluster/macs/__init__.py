"""Machines and what they are: found, reached over ssh, asked, as frozen facts."""
