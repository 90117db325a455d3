"""See cute."""
