#!/bin/sh
# Installs what `make test-services` needs and the machine lacks: a PostgreSQL server (Debian, Ubuntu).
set -eu
if ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1; then
    exit 0
fi
sudo=""
[ "$(id -u)" = 0 ] || sudo="sudo"
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get update -qq
# Without a cluster of the distribution's own: the tests start a private server in a temporary folder.
$sudo mkdir -p /etc/postgresql-common
[ -e /etc/postgresql-common/createcluster.conf ] ||
    echo "create_main_cluster = false" | $sudo tee /etc/postgresql-common/createcluster.conf >/dev/null
$sudo apt-get install -y -qq --no-install-recommends postgresql >/dev/null
