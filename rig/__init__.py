"""The control side of kimi-rig. The other program, rigctl, lies on the host and in files/hostkit."""
