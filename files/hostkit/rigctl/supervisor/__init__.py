"""The main process of a serving unit: checks, start, load progress, acceptance, watchdog, end."""
