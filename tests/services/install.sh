#!/bin/sh
# Installs what `make test-services` needs and the machine lacks (Debian, Ubuntu): a PostgreSQL server, container runtimes.
set -eu
wanted=""
ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || wanted="postgresql"
command -v bwrap >/dev/null || wanted="$wanted bubblewrap"
command -v podman >/dev/null || wanted="$wanted podman"
PATH="$PATH:/usr/sbin" command -v runc >/dev/null || wanted="$wanted runc"
[ -n "$wanted" ] || exit 0
sudo=""
[ "$(id -u)" = 0 ] || sudo="sudo"
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get update -qq
# Without a cluster of the distribution's own: the tests start a private server in a temporary folder.
$sudo mkdir -p /etc/postgresql-common
[ -e /etc/postgresql-common/createcluster.conf ] ||
    echo "create_main_cluster = false" | $sudo tee /etc/postgresql-common/createcluster.conf >/dev/null
# shellcheck disable=SC2086  # words
$sudo apt-get install -y -qq --no-install-recommends $wanted >/dev/null
