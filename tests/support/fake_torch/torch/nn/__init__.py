"""See torch."""
