"""The real hosts. One line a host; data beside the name wins over group_data/.

gpu = [("kimi-1.example.com", {"ssh_user": "root", "enable_at_boot": "vllm-base"})]
"""

gpu = [("kimi-1.example.com", {"ssh_user": "root"})]
