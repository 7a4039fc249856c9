"""What a configuration comes to, described part by part without starting a process: each function takes a resolved
configuration and returns plain values, made by the code that acts in a run."""
