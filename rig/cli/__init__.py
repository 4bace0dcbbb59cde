"""The commands an operator types, one module each."""
