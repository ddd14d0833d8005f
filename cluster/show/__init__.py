"""What the terminal shows: tables, progress. The only users of rich."""
