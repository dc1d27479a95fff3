"""Tensor parallelism: collectives, and the processes that run the ranks of one model.

group       the collectives of a forward: sum and gather over ranks
torch_group implements them with torch.distributed (gloo or nccl)
channel     messages between rank 0 and each other rank
processes   starts, watches and ends the processes of the other ranks
lockstep    makes all ranks make the same calls and take the same decisions
"""
