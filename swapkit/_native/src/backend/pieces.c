/* pieces.c - see pieces.h. */
#include "backend/pieces.h"

void sk__pieces_open(sk__pieces *pieces) {
    sk__mutex_init(&pieces->lock, SK_RANK_BACKEND);
    pieces->fork_node = (sk__fork_node){.lock = &pieces->lock};
    sk__fork_register(&pieces->fork_node);
}

void sk__pieces_close(sk__pieces *pieces) {
    sk__fork_unregister(&pieces->fork_node);
    sk__mutex_destroy(&pieces->lock);
}

void sk__pieces_locked(sk__pieces *pieces, size_t nbytes) {
    sk__lock(&pieces->lock);
    pieces->locked_bytes += nbytes;
    if (pieces->cut_bytes == 0 || nbytes < pieces->cut_bytes) {
        pieces->cut_bytes = nbytes;
    }
    sk__unlock(&pieces->lock);
}

void sk__pieces_unlocked(sk__pieces *pieces, size_t nbytes) {
    sk__lock(&pieces->lock);
    sk_assert(nbytes <= pieces->locked_bytes);
    pieces->locked_bytes -= nbytes;
    if (pieces->locked_bytes == 0) {
        pieces->cut_bytes = 0;
    }
    sk__unlock(&pieces->lock);
}

/* The bytes of host memory at whose multiples a copy must be cut; 0: nowhere. */
static size_t cut_bytes_of(sk__pieces *pieces) {
    sk__lock(&pieces->lock);
    size_t cut_bytes = pieces->cut_bytes;
    sk__unlock(&pieces->lock);
    return cut_bytes;
}

int sk__pieces_copy(sk__pieces *pieces, const sk__copier *copier, const void *self,
                    sk__copy *copy) {
    uintptr_t host = (uintptr_t)(copy->kind == SK_HOST_TO_DEVICE ? copy->from : copy->to);
    size_t cut_bytes = copy->kind == SK_DEVICE_TO_DEVICE ? 0 : cut_bytes_of(pieces);
    size_t offset = 0;
    int result = 0;
    while (offset < copy->nbytes && result == 0) {
        sk__copy piece = *copy;
        piece.to += offset;
        piece.from += offset;
        piece.nbytes -= offset;
        if (cut_bytes != 0) {
            piece.nbytes = sk__min(piece.nbytes, cut_bytes - (host + offset) % cut_bytes);
        }
        result = copier->start(self, &piece);
        copy->what = piece.what;
        if (result != 0 && offset > 0) {
            copier->settle(self, copy->stream);
        }
        offset += piece.nbytes;
    }
    return result;
}
