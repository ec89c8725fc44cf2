"""What a step needs on each device, which plans fit, and which of them to take; none of it loads torch."""
