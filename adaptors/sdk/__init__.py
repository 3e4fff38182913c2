"""The functions of the MindIO TFT SDK by their names and parameters, backed by our controller and processor."""
