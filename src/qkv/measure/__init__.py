"""How fast this machine is: reading memory, arithmetic, attention, and a whole model."""
