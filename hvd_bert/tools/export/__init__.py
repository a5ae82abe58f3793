"""The command that converts a trained model to ONNX."""
