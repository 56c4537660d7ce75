"""Making and describing traces."""
