"""The plan of one host: catalogue, facts and settings together, with the command lines of its engines."""
