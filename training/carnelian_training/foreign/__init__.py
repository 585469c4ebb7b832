"""Checkpoints of other toolkits: NeMo's `.nemo` and the `.pt` of NVIDIA's DeepLearningExamples (DLE)."""
