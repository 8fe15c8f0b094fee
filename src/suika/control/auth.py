"""Who may do what: roles, rights and tenants. Pure rules; no tokens, no HTTP."""
