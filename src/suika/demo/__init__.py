"""`suika demo`: a cluster on this machine, three real jobs, and every move held against its twin and its rival."""
