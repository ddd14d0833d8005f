"""What keeps Macs from working as one, and what to type or plug. Pure."""
