"""After a controller's restart: running jobs are taken back as they are, or declared lost; none runs twice."""
