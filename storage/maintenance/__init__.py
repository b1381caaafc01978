"""What an operator needs between the day of installation and the day the disk would be full."""
