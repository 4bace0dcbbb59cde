"""Catalogues: inventory/*.yaml as typed data; a wrong entry is named with file, line and nearest name."""
