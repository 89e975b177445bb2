"""Who may call: keys, roles, their limits, sign-in, the audit log."""
