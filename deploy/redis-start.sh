#!/bin/sh
# redis-start.sh USERS.acl [option of redis-server …]
# Start Redis with those access rules; the place-holder `>change-me-ROLE` becomes the hash of $REDIS_ROLE_PASSWORD.
# A password that is missing or weak is refused: an open Redis is worse than none.
set -eu
umask 077

rules=$1
shift
ready=$(mktemp)
cp "$rules" "$ready"
for role in $(sed -n 's/.*>change-me-\([a-z]*\).*/\1/p' "$rules"); do
    variable=REDIS_$(printf %s "$role" | tr a-z A-Z)_PASSWORD
    password=$(printenv "$variable" || true)
    case $password in
        *[!A-Za-z0-9_-]* | change-me* | "") weak=yes ;;
        ????????????????*) weak=no ;;
        *) weak=yes ;;
    esac
    if [ $weak = yes ]; then
        echo "$variable must have at least 16 letters, digits, - or _" >&2
        exit 1
    fi
    hash=$(printf %s "$password" | sha256sum | cut -d ' ' -f 1)
    sed -i "s/>change-me-$role /#$hash /" "$ready"
done
exec redis-server "$@" --aclfile "$ready"
