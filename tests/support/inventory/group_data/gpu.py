"""Hosts with 8x RTX PRO 6000 Blackwell: the defaults of all.py are made for them."""
