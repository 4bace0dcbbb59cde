"""The real hosts. One line a host; data beside the name wins over group_data/.

gpu = [("203.0.113.7", {"ssh_user": "root", "configurations": ["sglang-base"], "enable_at_boot": "sglang-base"})]

docs/first-steps/first-host.md has the keys.
"""

gpu = [("kimi-1.example.com", {"ssh_user": "root"})]
