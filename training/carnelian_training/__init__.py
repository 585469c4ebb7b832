"""CTC speech recogniser training: data, features, models, the loop, evaluation."""
