"""Commands on serving units: status, chat, switch, logs, free, doctor."""
