"""Facts: what is so on a host, read in one command and parsed here."""
