"""Checkpoints of other toolkits: NeMo, NVIDIA's DeepLearningExamples (DLE), fairseq, Hugging Face's `transformers`."""
