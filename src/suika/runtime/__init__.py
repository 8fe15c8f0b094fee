"""Inside a job's processes: fork server, groups, safe points, snapshots, the redeployment protocol."""
