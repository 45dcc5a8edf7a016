"""From one single-device model and a plan to one ONNX program per rank."""
