"""What a plan becomes on its host: unit files, orders for rigctl, the receipt, states for a rollback. Pure."""
