"""Everything that touches transformers' moving interfaces, on both sides of its renames."""
