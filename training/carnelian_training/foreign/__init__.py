"""Conversion of checkpoints of NeMo, NVIDIA's DeepLearningExamples (DLE), fairseq and Hugging Face `transformers`."""
