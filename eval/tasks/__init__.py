"""Tasks: what a trained model is measured on, and the simple models it is measured against."""
