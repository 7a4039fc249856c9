"""What works on this machine, each finding with its fix: ``launch/doctor.sh``."""
