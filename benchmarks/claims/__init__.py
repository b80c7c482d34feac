"""Claims about ``torch.compile`` that people repeat. They are data; rows alone make the verdicts."""
