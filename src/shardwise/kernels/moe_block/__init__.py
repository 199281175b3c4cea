"""The whole feed-forward block of experts: norm and routing, then routed experts beside the shared one."""
