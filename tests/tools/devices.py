"""The devices of tests."""

import torch

CPU = torch.device("cpu")
