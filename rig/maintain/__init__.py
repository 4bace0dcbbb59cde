"""Commands that change this repository: locks, new engine releases, pinned revisions."""
