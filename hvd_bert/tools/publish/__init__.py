"""Model cards, and the command that uploads a trained model to the Hugging Face hub."""
