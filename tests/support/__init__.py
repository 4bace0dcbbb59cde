"""What tests of several rooms share; inventory/ are their own catalogues and host data."""
