"""What is optimised, as tensor maths on [B, T]: advantages, losses, corrections, and how they are averaged.

``objective`` puts it together for the training engine; ``registry`` is where custom functions come in. Nothing here
knows of processes or devices, except that registries travel over Ray when somebody started it.
"""
