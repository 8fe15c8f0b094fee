"""Accounts, their bearer tokens (hashed at rest) and tenants' quotas, in the controller's database."""
