"""The durable store's tables. A change here comes with a migration in `migrations/versions`."""
