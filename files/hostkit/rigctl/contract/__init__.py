"""What both programs agree on: where things lie on a host, and the orders that the control side writes for rigctl."""
