"""What is trained: full, freeze, lora. One file a method."""
