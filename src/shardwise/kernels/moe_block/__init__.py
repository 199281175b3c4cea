"""The whole feed-forward block of experts: norm and routing, then routed experts beside the shared one."""

from shardwise.kernels.moe_block.reference import Then

__all__ = ["Then"]
